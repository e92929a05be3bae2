"""What a layout needs and sends: state, parameters, bytes, activations, in closed form."""
