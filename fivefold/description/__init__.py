"""Describes each kind of layer: operations, parameters, FLOPs and bytes; torch-free."""
