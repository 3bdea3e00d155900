"""Text in and out: tokenizer, streaming detokenizer, prompt checks, chat templates."""
