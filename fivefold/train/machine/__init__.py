"""What a run needs from its machine: devices, processors, memory, open files."""
