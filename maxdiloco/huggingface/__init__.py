"""Import and export of Hugging Face models: config.json, safetensors and tokenizer files."""
