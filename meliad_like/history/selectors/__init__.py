"""Selectors of ancient history: trained on the gains of spans, and what ranks candidates by them."""
