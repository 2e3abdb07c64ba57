def draw(e, store, seeds, path): return path
