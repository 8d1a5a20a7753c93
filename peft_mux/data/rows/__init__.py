"""What is made of rows once they are tokens."""
