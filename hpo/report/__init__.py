"""`hpo report`: a study as one HTML page that opens without a network, as plain data, and as pictures.

`data` reads the study; `edges`, `causes` and `timeline` analyse it; `figures`, `search_figures` and `page` show
it; `pictures` writes the PNG files. Text from a study is always escaped: by the templates in the page, by
`drawable.snapshot` in the figures.
"""
