"""What every folder of this room uses."""
