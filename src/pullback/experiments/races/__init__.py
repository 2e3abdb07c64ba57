"""Races: K-FAC's rules beside AdamW, Muon, SOAP and SGD on text and images."""
