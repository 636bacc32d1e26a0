"""What queries see of keys: layouts, masks, and the tiles of arrays made of both."""
