"""How long operations, layers and stages take for a microbatch."""
