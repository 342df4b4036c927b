"""The console: a page for operators, and the JSON that it shows."""
