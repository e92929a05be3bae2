"""The loss with ZeRO++'s rounded messages beside bf16: python -m benchmarks.zeropp [STEPS [SEEDS]]

Trains the debug model under ZeRO-3 on two ranks of this machine's CPU, from the same weights on the
same data, with weights gathered in INT8 (qwZ), gradients sent in INT4 (qgZ), and both. The table is
that of `benchmarks.fp8`; the difference of a run in fp32 is the noise to compare with: it is
rounding, too, and nothing else.
"""

from benchmarks.fp8 import compare, parser

STEPS, SEEDS = 500, 2
_ZERO3 = ("--data-parallel-sharding-strategy", "optim_grads_params")
_QWZ, _QGZ = "--zero-quantized-weights", "--zero-quantized-gradients"
WAYS = {
    "bf16": (*_ZERO3, "--bf16"),
    "qwZ": (*_ZERO3, "--bf16", _QWZ),
    "qgZ": (*_ZERO3, "--bf16", _QGZ),
    "qwZ and qgZ": (*_ZERO3, "--bf16", _QWZ, _QGZ),
    "noise: fp32": (*_ZERO3, "--precision", "fp32"),
}


def main() -> None:
    """Train with each technique and without."""
    asked = parser(__doc__ or "", STEPS, SEEDS).parse_args()
    compare(WAYS, asked.steps, asked.seeds, ranks=2)


if __name__ == "__main__":
    main()
