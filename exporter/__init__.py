"""Cut a trained vision-language model into graphs and write a deployment bundle."""
