"""HTTP: the OpenAI API's completions and chat completions in front of the engine.

``create_app`` gives the ASGI application, ``serve`` a whole server. Nothing in here decides
anything about requests in flight; it reads JSON, asks the engine, and writes JSON.
"""
