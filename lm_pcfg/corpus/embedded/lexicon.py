"""The words, in order of rank inside their class; their weights follow from the rank (see source_grammar.py).

A class without number lists plain words. A class with number lists `singular/plural` pairs, one preterminal each. Some
words are in two classes (fish, cook, ship, sink), as in English.
"""

WORDS = {
    "Det": "the/the a/some this/these every/many that/those",
    "Adj": "old small big young good new quiet little strange red happy tired heavy white",
    "Prep": "near with behind by beside without under",
    "Adv": "today often again slowly now quietly here together outside",
    "Say": "says/say knows/know thinks/think hopes/hope believes/believe",
    "That": "that",
    "And": "and",
    "Call": "listen wait look stop hello enough",
    "Noun": (
        "dog/dogs ship/ships man/men cook/cooks cat/cats sailor/sailors woman/women pot/pots horse/horses "
        "boat/boats car/cars soup/soups farmer/farmers captain/captains street/streets knife/knives cow/cows "
        "island/islands shop/shops table/tables goat/goats whale/whales house/houses guest/guests tree/trees "
        "harbour/harbours child/children cake/cakes mouse/mice wave/waves bus/buses plate/plates barn/barns "
        "fisherman/fishermen teacher/teachers baker/bakers field/fields shark/sharks school/schools "
        "apple/apples pig/pigs storm/storms driver/drivers oven/ovens hen/hens fish/fish bridge/bridges "
        "spoon/spoons fence/fences sail/sails park/parks cup/cups sheep/sheep net/nets letter/letters "
        "waiter/waiters fox/foxes gull/gulls doctor/doctors potato/potatoes owl/owls reef/reefs thief/thieves "
        "onion/onions"
    ),
    "VT": (
        "chases/chase catches/catch meets/meet cooks/cook feeds/feed reaches/reach visits/visit tastes/taste "
        "sees/see leaves/leave buys/buy washes/wash likes/like spots/spot calls/call cuts/cut follows/follow "
        "steers/steer drives/drive serves/serve watches/watch pulls/pull sells/sell burns/burn bites/bite "
        "passes/pass finds/find stirs/stir hears/hear sinks/sink paints/paint breaks/break guards/guard "
        "circles/circle steals/steal orders/order"
    ),
    "VI": (
        "sleeps/sleep swims/swim works/work boils/boil runs/run drifts/drift waits/wait bakes/bake eats/eat "
        "sails/sail walks/walk smells/smell barks/bark dives/dive talks/talk steams/steam jumps/jump "
        "sinks/sink laughs/laugh falls/fall hides/hide floats/float arrives/arrive cools/cool grazes/graze "
        "drowns/drown smiles/smile spills/spill"
    ),
}
