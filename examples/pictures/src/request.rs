//! The way of one request, drawn by hand.

use crate::svg::{MARGIN, Picture, WIDTH};

pub fn request() -> String {
    let mut picture = Picture::new(
        "One request",
        "A request goes through the layer, the limiter and the store to a decision; the service is \
         called only if it is allowed",
    );
    let rows = [
        ("Layer", "takes key and cost from the head", "of the request"),
        ("Limiter", "adds its quota and algorithm,", "answers from a remembered denial"),
        ("Store", "decides in one step: in memory,", "or by one script in Redis"),
        ("Decision", "allowed, allowed after a delay,", "or denied with retry_after"),
    ];
    picture.y += 12.0;
    for (i, (name, one, two)) in rows.into_iter().enumerate() {
        let y = picture.y;
        picture.rect(MARGIN, y, WIDTH - 2.0 * MARGIN, 64.0, "box");
        picture.text(MARGIN + 18.0, y + 38.0, "title", name);
        picture.text(MARGIN + 150.0, y + 28.0, "", one);
        picture.text(MARGIN + 150.0, y + 50.0, "", two);
        picture.y += 64.0;
        if i < 3 {
            picture.arrow((MARGIN + 60.0, picture.y), (MARGIN + 60.0, picture.y + 24.0));
            picture.y += 26.0;
        }
    }
    let y = picture.y + 26.0;
    let half = (WIDTH - 2.0 * MARGIN - 24.0) / 2.0;
    for (x, title, text, class) in [
        (MARGIN, "allowed", "your service answers", "allowed"),
        (MARGIN + half + 24.0, "denied", "429, Retry-After", "denied"),
    ] {
        picture.arrow((x + 60.0, picture.y), (x + 60.0, y - 2.0));
        picture.rect(x, y, half, 64.0, "box");
        picture.rect(x, y, 6.0, 64.0, class);
        picture.text(x + 18.0, y + 27.0, "ink", title);
        picture.text(x + 18.0, y + 50.0, "", text);
    }
    picture.y = y + 64.0;
    picture.finish()
}
