"""Reports for people: on a terminal and as one HTML file."""
