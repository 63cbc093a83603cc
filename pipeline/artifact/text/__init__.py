"""Text in and out of an artifact: the tokenizer that it carries, and vectors of sentences."""
