"""`hpo report`: a study as one HTML page that opens without a network, as plain data, and as pictures.

`data` reads the study; `edges`, `causes` and `timeline` make something of it; `figures`, `search_figures` and
`page` show it; `pictures` writes the PNG files. What comes from a study is text wherever it goes: the templates
escape it in the page, `snapshot.snapshot` in the figures.
"""
