"""Decides: pure nouns (:mod:`job`, :mod:`generation`, :mod:`loop`), and a shell around them."""
