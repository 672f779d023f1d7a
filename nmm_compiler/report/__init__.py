"""Shows records as text, HTML pages, charts and traces; it knows no record itself."""
