"""How long what data-parallel ranks send takes, and the optimizer's update."""
