"""Shows programs as text, pictures, pages and figures."""
