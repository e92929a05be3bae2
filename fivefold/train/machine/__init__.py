"""What a run asks of its machine: devices, processors, memory, open files."""
