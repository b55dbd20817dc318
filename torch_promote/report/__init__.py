"""Reports: `Report` says its facts, tables and charts once; terminal, page, plot and JSON render them."""
