"""What surrounds PEFT's injection of an adapter: what is checked, hidden, drawn and given back."""
