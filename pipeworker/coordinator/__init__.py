"""Decides: pure nouns (:mod:`job`, :mod:`generation`, :mod:`steps`), and a shell around them."""
