"""From users to tokens: templates, tokenizer, semantic-ID vocabulary, labels and soft tokens."""
