"""What reports share in which they are read and saved: template, style, tree, charts, numbers, files."""
