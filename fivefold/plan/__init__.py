"""Which layout to use, whether it fits, how fast it will be, and why not another one."""
