"""KV below the device: which chunks leave, come back and get evicted, and the moving of their bytes.

Deciding (``manager``, ``host``, ``policies``) is pure logic; doing (``arena``, ``mover``) is not.
"""
