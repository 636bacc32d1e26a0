"""What queries see of keys: layouts, masks, and in arrays what both make visible."""
