"""What the server offers, as an OpenAPI document and a page of it."""
