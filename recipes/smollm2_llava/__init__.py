"""Recipe of ``smollm2-llava``: SmolLM2-135M, a language model of real texts, behind a tower whose rows say words."""
