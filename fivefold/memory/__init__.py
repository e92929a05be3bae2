"""What the device does not keep between forward and backward."""
