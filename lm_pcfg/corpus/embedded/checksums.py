"""What the bytes of the generated files must be, by SHA-256."""

SHA256: dict[str, str] = {
    "train.txt": "07ed846fa06a1c0325e7efc3057fb205223077baed0b25f5041626c27db2a1e2",
    "train.trees": "2df02389b8c85ab21478fb064d43d430372144ce64df4f1abf648b12c44ef7dc",
    "valid.txt": "561f46dc478fe463f830468c2e25ef3944349471647ec206d714d6ecbe9e1b3e",
    "valid.trees": "763fe15e235b8687b313c8749a29e7986343265c36411e8984cb7b14bcb82034",
    "test.txt": "d0519d44004bcad1017ca5c5429ee99554637e64ffc92737d1356e633308219b",
    "test.trees": "f9c1d1edf3abdbc2b09e1b53618931f58d356cb798a0e36fa0e2df673201eafc",
}
