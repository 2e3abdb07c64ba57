"""Influence of training samples: experiments that retrain, find wrong labels, and time."""
