"""Documents as parts: pages of PDFs, passages of texts."""
