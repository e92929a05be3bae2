"""Conversations: tokens and what is learnt of them, against transformers' chat templates."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.config.data import DataConfig
from fivefold.config.training import TrainingConfig
from fivefold.data.conversations import conversation, documents
from fivefold.data.dataset import Corpus, check_labels
from fivefold.data.packing import BEGINS, IGNORED, LEARNT, Packing, pack
from fivefold.data.prepare import prepare
from fivefold.data.streams import Conversations
from fivefold.data.template import ChatTemplate
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.validation import validation_sets
from fivefold.errors import ConfigError, DataError
from tests.byte_level import byte_level

SPECIAL = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"]
CHATML = """\
{%- if tools %}{{ '<|im_start|>tools ' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'nobody' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>\n' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
# The token that ends a document stands after each answer, as in Llama 2's.
TURNS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{ ' ' + message.content | trim + eos_token }}{% endgeneration %}
    {%- else %}{{ raise_exception('only users and assistants') }}{% endif %}
{%- endfor %}
"""
# Earlier answers are shown without their thoughts, as in Qwen3's.
THOUGHTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{- '<think></think>' }}{% endif %}
    {{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def unmarked(template):
    return template.replace("{%- generation %}", "{%- if true %}").replace("endgeneration", "endif")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A function that keeps a tokenizer with a template: its folder, and transformers' reading."""
    transformers = pytest.importorskip("transformers")
    backend = byte_level("user assistant the cat sat [INST] on the mat", SPECIAL, 400)

    def keep(template):
        folder = tmp_path_factory.mktemp("tokenizer")
        oracle = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="<|endoftext|>",
            chat_template=template,
        )
        oracle.save_pretrained(folder)
        return folder, oracle

    return keep


@pytest.fixture(scope="module")
def cases(kept):
    return {
        name: (*kept(of), kept(unmarked(of))[0])
        for name, of in {"chatml": CHATML, "turns": TURNS}.items()
    }


def mine(folder, record):
    """Ids and what is learnt, of each document of a record."""
    texts = list(documents(conversation(record, "here"), ChatTemplate.load(str(folder))))
    encoded = Tokenizer.load(folder).encode_spans(texts)
    return [(ids.tolist(), inside.astype(int).tolist()) for ids, inside in encoded]


words = st.lists(
    st.sampled_from(["the", " cat", "é", "😀 ", "\n", "  ", "<|im_end|>", "x", "한"]), max_size=6
).map(lambda bits: "a" + "".join(bits) + "z")
turns = st.lists(words, min_size=1, max_size=3).flatmap(
    lambda asked: st.tuples(
        st.just(asked), st.lists(words, min_size=len(asked), max_size=len(asked))
    )
)


@pytest.mark.parametrize("name", ["chatml", "turns"])
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(said=turns, asks=st.booleans())
def test_tokens_and_learnt_ones_are_those_of_transformers(cases, name, said, asks):
    """With the template's marks, and the same without them."""
    folder, oracle, without = cases[name]
    messages = []
    for question, answer in zip(*said, strict=True):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    if asks:
        messages.append({"role": "user", "content": "and then?"})
    tools = [{"name": "ls <a>"}] if asks and name == "chatml" else None
    wanted = oracle.apply_chat_template(
        messages,
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    expected = [(wanted["input_ids"], wanted["assistant_masks"])]
    record = {"messages": messages, "tools": tools}
    assert mine(folder, record) == expected
    assert mine(without, record) == expected


def test_an_answer_that_later_ones_change_is_a_document_of_its_own(kept):
    folder, oracle = kept(THOUGHTS)
    said = ["hi", "hello", "more?", "no"]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, said, strict=True)
    ]
    found = mine(folder, {"messages": messages})
    learnt = []
    for (ids, inside), upto in zip(found, (2, 4), strict=True):
        wanted = oracle.apply_chat_template(messages[:upto], tokenize=True, return_dict=True)
        assert ids == wanted["input_ids"]
        learnt.append(oracle.decode([i for i, on in zip(ids, inside, strict=True) if on]))
    assert learnt == [f"<think></think>{text}<|im_end|>\n" for text in ("hello", "no")]


REASONS = """\
{%- for message in messages %}
    {{- message.role + message.NAME | default('-') + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant' }}{% endif %}
"""


@pytest.mark.parametrize("read", ["thinking", "reasoning_content"])
@pytest.mark.parametrize("written", ["thinking", "reasoning_content", "reasoning"])
def test_thoughts_have_the_name_that_a_template_reads(read, written):
    answer = {"role": "assistant", "content": "so", written: "hm"}
    record = {"messages": [{"role": "user", "content": "q"}, answer]}
    template = ChatTemplate({"default": REASONS.replace("NAME", read)}, {}, "here")
    ((text, spans),) = documents(conversation(record, "here"), template)
    assert text == "user-qassistanthmso"
    assert [text[slice(*span)] for span in spans] == ["hmso"]


@pytest.mark.parametrize(("tools", "name"), [(None, "default"), ([], "tool_use")])
def test_no_tools_are_tools_that_are_asked_for(tools, name):
    template = ChatTemplate({"default": "default", "tool_use": "tool_use"}, {}, "here")
    assert template.render([], tools, "here")[0] == name


def test_the_forms_of_a_conversation_are_one():
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    system = {"role": "system", "content": "s"}
    for record, begins in (
        ({"messages": [system, user, answer], "prompt": "unread"}, 0),
        ({"system": "s", "messages": [user, answer]}, 1),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            0,
        ),
        ({"system": "s", "prompt": "q", "completion": "a", "tools": '[{"name": "ls"}]'}, 2),
        ({"prompt": [system, user], "completion": [answer]}, 2),
    ):
        found = conversation(record, "here")
        assert found.messages == (system, user, answer)
        assert (found.given, found.answers) == (begins, [2])
        assert found.tools == ([{"name": "ls"}] if "tools" in record else None)


def test_answers_of_a_prompt_are_not_learnt(kept):
    folder, oracle = kept(CHATML)
    user = {"role": "user", "content": "q"}
    prompt = [user, {"role": "assistant", "content": "shown"}, user]
    record = {"prompt": prompt, "completion": "learnt"}
    ((ids, inside),) = mine(folder, record)
    told = oracle.decode([i for i, on in zip(ids, inside, strict=True) if on])
    assert told == "learnt<|im_end|>\n"


BAD = [
    ({"text": "x"}, r"a.jsonl:2 is no conversation: its keys are text\n(.|\n)*--no-sft --text-key"),
    ({"messages": "x"}, r"a.jsonl:2: 'messages' is a text, not a list of messages"),
    ({"messages": [{"role": "user", "content": "x"}]}, "a.jsonl:2 has no answer to learn"),
    ({"messages": [{"content": "x"}]}, r"a.jsonl:2: messages\[0\] has no role"),
    (
        {"conversations": [{"from": "humen", "value": "x"}]},
        r"conversations\[0\] is from 'humen', .*did you mean 'human'",
    ),
    (
        {"messages": [{"role": "assistant", "content": 3}]},
        r"messages\[0\]: its content is a number; it has to be a text",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "weight": 0}]},
        r"messages\[0\] has a weight of 0",
    ),
    ({"messages": [], "tools": "ls"}, "a.jsonl:2: 'tools' is not JSON"),
    ({"messages": [], "tools": {}}, "'tools' is an object, not a list"),
    (
        {"messages": [{"role": "assistant", "content": "\ufdd0"}]},
        "a noncharacter of Unicode",
    ),
    (
        {"messages": [{"role": "bot", "content": "x"}, {"role": "assistant", "content": "x"}]},
        r"a.jsonl:2: the chat template in .* cannot be used for it: only users and assistants",
    ),
]
GOOD = {"prompt": "the cat?", "completion": "the mat"}


@pytest.fixture
def config(tmp_path, cases):
    def config(*records, name="turns", **options):
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
        settings = {
            "data_path": (str(tmp_path / "a.jsonl"),),
            "tokenizer_model": str(cases[name][0]),
            "data_cache_path": str(tmp_path / "cache"),
            "sft": True,
            "split": "1",
        }
        return DataConfig(**settings | options)

    return config


@pytest.mark.parametrize(("record", "message"), BAD)
def test_what_is_wrong_is_named_with_its_line(config, record, message):
    with pytest.raises(DataError, match=message):
        prepare(config(GOOD, record), 16, 1)


def test_what_cannot_be_trained_on_is_refused(config, tmp_path, kept):
    with pytest.raises(ConfigError, match="sft needs tokenizer_model"):
        prepare(config(GOOD, tokenizer_model=None), 16, 1)
    with pytest.raises(ConfigError, match=r"text_key body names(.|\n)*no eod_mask_loss has"):
        prepare(config(GOOD, text_key="body", eod_mask_loss=False), 16, 1)
    with pytest.raises(ConfigError, match="tokens holds tokens already, and sft needs conv"):
        (tmp_path / "tokens.idx").touch()
        prepare(config(GOOD, data_path=(str(tmp_path / "tokens"),)), 16, 1)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"b.txt cannot hold conversations(.|\n)*--no-sft"):
        prepare(config(GOOD, data_path=(str(tmp_path / "b.txt"),)), 16, 1)
    bare, _ = kept(None)
    with pytest.raises(DataError, match="has no chat template, which --sft needs"):
        prepare(config(GOOD, tokenizer_model=str(bare)), 16, 1)
    with pytest.raises(DataError, match=r"the valid split of a.jsonl has none of its 1 conv"):
        _ = prepare(config(GOOD, split="9,1"), 16, 1).valid


def test_what_has_nothing_to_learn_is_refused(config):
    """All answers come after the end of their samples, so that a mean loss has no value."""
    late, sets = {"prompt": "the cat " * 40, "completion": "the mat"}, {"eval_interval": 1}
    data = prepare(config(late, late), 16, 1)
    with pytest.raises(DataError, match=r"train split of a.jsonl has nothing(.|\n)*2 conv.* cut"):
        check_labels(data.train, data.train.num_samples)
    check_labels(prepare(config(late, GOOD), 16, 1).train, 2)

    split = prepare(config(GOOD, late, split="1,1"), 16, 1)
    with pytest.raises(DataError, match=r"valid split of a.jsonl has nothing"):
        validation_sets(TrainingConfig(**sets), split)
    named = config(late)
    named = prepare(replace(named, valid_data_path=(f"late={named.data_path[0]}",)), 16, 1)
    with pytest.raises(DataError, match=r"validation set late: the valid split of a.jsonl"):
        validation_sets(TrainingConfig(full_validation=True, **sets), named)


def test_templates_run_in_a_sandbox(kept):
    folder, _ = kept("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match="cannot be used for it: access to attribute"):
        mine(folder, GOOD)


def test_rows_of_parquet_are_lines_of_json(config, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "name": "x"}]
    parquet.write_table(pyarrow.table({"messages": [talk] * 3}), tmp_path / "a.parquet")
    lines = prepare(config(*[{"messages": talk}] * 3), 16, 1).corpora[0]
    rows = prepare(config(data_path=(str(tmp_path / "a.parquet"),)), 16, 1).corpora[0]
    assert rows.data.tokens.tolist() == lines.data.tokens.tolist()
    assert rows.marks.tokens.tolist() == lines.marks.tokens.tolist()


def test_a_sample_holds_whole_conversations(config):
    """Every learnt token of every conversation that fits is learnt once, in its own document."""
    records = [{"prompt": "cat " * n, "completion": f"mat {n} " * (n % 5 + 1)} for n in range(40)]
    prepared = prepare(config(*records), 64, 1)
    (corpus,) = prepared.corpora
    seen = []
    for index in range(prepared.train.num_samples):
        batch = prepared.train.microbatch([index])
        assert batch.documents_BS[0, 0] == 0
        for document in np.unique(batch.documents_BS):
            inside = batch.documents_BS[0] == document
            assert batch.positions_BS[0, inside].tolist() == list(range(inside.sum()))
            labels = batch.labels_BS[0, inside]
            if (labels != IGNORED).any():
                seen.append(labels[labels != IGNORED].tolist())
    starts = corpus.data.document_starts
    wanted = []
    for start, end in pairwise(starts):
        end = min(end, start + 65)
        learnt = corpus.marks.tokens[start:end] == LEARNT
        if learnt.any():
            wanted.append(corpus.data.tokens[start:end][learnt].tolist())
    assert sorted(seen) == sorted(wanted)
    assert prepared.train.packed.endswith(" conversations cut")


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), room=st.integers(2, 7))
def test_samples_take_conversations_in_order_and_pad(lengths, room):
    starts = np.cumsum([0, *lengths])
    tokens = np.arange(1, starts[-1] + 1)
    marks = np.full(len(tokens), LEARNT)
    marks[starts[:-1]] = BEGINS
    stream = Conversations(tokens, marks, starts, Packing(room - 1, 0))
    seen, padding = [], 0
    for sample in range(len(stream)):
        window, about = stream.window(sample)
        real = window != 0
        padding += int((~real).sum())
        seen += window[real].tolist()
        assert about[0] == BEGINS
        assert about[~real].tolist() == [BEGINS, 0, 0, 0, 0, 0, 0][: (~real).sum()]
        batch = pack(window[None], np.array([sample]), Packing(room - 1, 0), about[None])
        begins = np.flatnonzero(about[:-1] & BEGINS)
        assert (
            np.flatnonzero(np.diff(batch.documents_BS[0], prepend=-1)).tolist() == begins.tolist()
        )
    kept = [
        token
        for start, length in zip(starts.tolist(), lengths, strict=False)
        for token in range(start + 1, start + min(length, room) + 1)
    ]
    assert seen == kept
    assert (stream.padding, stream.cut) == (padding, sum(length > room for length in lengths))


def test_what_is_learnt_is_of_the_fingerprint(write_documents):
    data = write_documents([[1, 2, 3, 4]])
    marks = [write_documents([bits], np.uint8) for bits in ([2, 0, 1, 1], [2, 1, 1, 1])]
    one, other = (Corpus("x", data, None, each).identity() for each in marks)
    assert one != other
