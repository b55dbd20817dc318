"""Reports: `Report` says its facts, tables and charts once; terminal, page, plot, JSON and CSV render them."""
