// Package decoy keeps files that nobody has a reason to change, and stops programs that treat them as an encryptor does. The files
// are in a journal before they are made. A permission event of fanotify holds each open of one until it is judged.
package decoy
