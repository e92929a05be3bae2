"""What each kind of layer is made of, in operations, parameters, FLOPs and bytes; torch-free."""
