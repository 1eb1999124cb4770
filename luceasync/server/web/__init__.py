"""The web page, and the API's description as OpenAPI and as a page."""
