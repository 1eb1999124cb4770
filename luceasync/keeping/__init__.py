"""What is kept of prompts and answers, and taken up again. Knows no queue and runs no model."""
