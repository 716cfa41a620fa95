"""`routeahead serve`: OpenAI's and Anthropic's APIs, and a page that shows the stream.

Needs the packages of the extra `serve`.
"""
