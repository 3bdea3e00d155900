"""What every folder of the exporter uses, and what uses none of them."""
