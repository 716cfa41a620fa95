"""Conversations: messages to tokens, tokens to text, text to reasoning, answer and tool calls.

What `routeahead chat` and `routeahead serve` share. It knows neither terminals nor HTTP.
"""
