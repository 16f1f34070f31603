"""What the bytes of the generated files must be, by SHA-256."""

SHA256: dict[str, str] = {
    "train.txt": "bbd3b2a5cd65b4c9148295d1429c229c0970b5b706117744586f861040f88b94",
    "train.trees": "88b35dd6af5a2cc546853b5d396108f4a7662d29d38db63369d20d3e38f7baa5",
    "valid.txt": "779b01f5a4135aa0ad0bf39f10598648f6cd313d4aeadd31b81d73b1a3d34b02",
    "valid.trees": "4b1e9bb3a8ad1d5643d607fb84da91ed7e58a647ebbad4cf7c0cf5772711441e",
    "test.txt": "ffa2c897a3d6a1acbfe1a24e8cc3f710ff8faaea8606011d16f63ee5ee7b32c0",
    "test.trees": "e321404f4ee6efb72e822c18ce903b351d5c261deb11d8ec86a1b10c17336696",
}
