"""Report of gradient synchronisation: figures of measured steps, and their timeline."""
