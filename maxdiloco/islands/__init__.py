"""Islands: separate programs that train one model through a log in an object store. No JAX here."""
