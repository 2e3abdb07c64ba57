"""Which changes of coordinates an optimizer does not notice."""
