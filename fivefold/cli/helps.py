"""Help texts of options that several commands share."""

RECIPE_HELP = "name of a shipped recipe, or path of a .toml file"
RUN_HELP = "run folder of `fivefold train`"
STEP_HELP = "step of the checkpoint (default: the latest)"
NPROC_HELP = "processes to start on this machine"
DEVICE_HELP = "auto: on GPUs if there are enough; cuda: ranks may share one"
JSON_HELP = "print the result as JSON"
