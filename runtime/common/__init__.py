"""What every folder of the runtime uses, and what uses none of them."""
