"""``tiny-blip2-flant5`` v2: the second form of the texts, a fresh decoder, no deep supervision."""
